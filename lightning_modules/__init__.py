"""What is trained and how it is scored. Importing this package is cheap; import the modules you need."""
