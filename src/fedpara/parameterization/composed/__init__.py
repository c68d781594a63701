"""A model's composed weights from its factors, and factors from composed weights."""

from fedpara.parameterization.composed.blocks import Block, Blocks, exact_products

__all__ = ["Block", "Blocks", "exact_products"]
