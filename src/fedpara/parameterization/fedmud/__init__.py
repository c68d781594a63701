"""The schemes of FedMUD (ICML 2025): block-wise Kronecker products, and sums that are linear in what trains."""
