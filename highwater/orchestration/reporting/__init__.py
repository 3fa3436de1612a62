"""What people are told: status, alerts, the doctor, one slice explained, one record located, metrics."""
