"""What there is: devices, real and emulated, and the figures published about them."""
