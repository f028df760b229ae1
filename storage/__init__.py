"""The ground floor: files in a folder or in a bucket behind one interface, locks, logs, sealed JSON, selections."""
