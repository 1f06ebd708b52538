"""Training and scoring of long-context models. Importing this package is cheap; import the modules you need."""
