"""Pure maths on frozen data: step time, memory, splits, decisions. No I/O, no clock."""
