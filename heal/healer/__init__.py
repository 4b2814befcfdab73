"""What :class:`heal.Healer` is made of: its parts, what it does around each step, how it ends."""
