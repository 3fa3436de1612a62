"""What a person decides, by command or by job: losses, rejects, holds, redriving, rebuilding, erasing, maintenance."""
