"""The streams that this project declares, in `streams/`."""
