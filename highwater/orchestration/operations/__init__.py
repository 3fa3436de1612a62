"""Operators' decisions, by command or job: losses, rejects, holds, redriving, rebuilding, erasing, maintenance."""
