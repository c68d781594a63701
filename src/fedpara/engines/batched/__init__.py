"""The batched engine: a cohort trains as one program."""
