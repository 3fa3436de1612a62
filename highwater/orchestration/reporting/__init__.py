"""What people are sent: status, alerts, the doctor, one slice explained, one record located, metrics."""
