"""What maintains the project and is not installed with it."""
