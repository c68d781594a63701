"""Operations over stacked clients that torch lacks or runs slowly."""
