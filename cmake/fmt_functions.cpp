// Compiled with fmt's FMT_HEADER_ONLY, and with all inline functions kept: what other sources link.
#include <fmt/format-inl.h>
