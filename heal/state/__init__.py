"""All that training changes: held, copied, hashed, kept in a ring of snapshots and put back."""
