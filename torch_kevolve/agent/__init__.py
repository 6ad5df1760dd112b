"""Agent: the search for a better kernel."""
