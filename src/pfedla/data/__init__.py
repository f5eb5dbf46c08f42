"""Files to arrays (dataset, datasets), labels to indices (partition), arrays to clients (federation)."""
