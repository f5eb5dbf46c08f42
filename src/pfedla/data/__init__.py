"""Files to arrays (datasets, formats), labels to indices (partition), arrays to clients (federation)."""
