"""apex's optimizers: halfpeak's rules under apex's arguments, state and ways of being called."""
