"""Files to arrays (datasets), labels to indices (partition), arrays to clients (federation)."""
