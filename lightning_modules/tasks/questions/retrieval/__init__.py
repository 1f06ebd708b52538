"""Tasks that ask for a fact hidden in a long text."""
