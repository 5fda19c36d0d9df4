"""How functional organization changes with size and with training: families, controlled shapes, trajectories."""
