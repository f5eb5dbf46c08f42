"""Files to arrays (datasets, npz), labels to indices (partition), arrays to clients (federation)."""
