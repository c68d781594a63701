"""The Flower engine: clients train on nodes elsewhere."""
