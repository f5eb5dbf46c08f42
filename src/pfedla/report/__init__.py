"""Pictures and tables. They read run folders only, and know nothing of how the numbers came about."""
