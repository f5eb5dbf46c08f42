"""A run from its settings to its results: experiment, run, folder, checkpoint, comparison."""
