"""Reports for people: status, alerts, the doctor, one slice explained, one record located, metrics."""
