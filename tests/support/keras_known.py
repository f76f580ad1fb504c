KNOWN: dict[tuple[str, str], dict[str, str]] = {}
