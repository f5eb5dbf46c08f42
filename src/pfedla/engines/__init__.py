"""Where the clients live. Engines take and give CPU tensors, whatever device they use."""
