"""Other people's training loops; each file needs the package it is named after."""
