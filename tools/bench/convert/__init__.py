"""What a conversion costs, beside a plain loop over the same tars that makes no dataset."""
