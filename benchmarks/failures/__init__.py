"""Every failure, injected into small real trainings, under healing and beside it."""
