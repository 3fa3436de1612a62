"""The command `highwater`: a module for each group of its commands."""
