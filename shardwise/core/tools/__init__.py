"""Small tools that know nothing of training: trees, hooks, checks of arguments."""
