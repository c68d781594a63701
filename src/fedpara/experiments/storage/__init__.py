"""Run folders on disk: what a run writes, and how it is read back."""
