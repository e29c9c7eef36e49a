"""mpkeras: mixed precision for Keras 3 that cannot fail silently."""
