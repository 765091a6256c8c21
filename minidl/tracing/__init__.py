"""Recording what a loader does, and reading it back."""
