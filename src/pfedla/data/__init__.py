"""Files and Python objects to arrays (sources), labels to indices (partition), arrays to clients (federation)."""
