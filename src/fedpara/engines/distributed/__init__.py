"""Several processes under torchrun, each training a share of the cohort."""
