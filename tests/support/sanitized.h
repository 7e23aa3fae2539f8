#pragma once

namespace tessera::testing {

/// Whether AddressSanitizer or ThreadSanitizer watches: they keep freed memory, to find uses of it, and need address space.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) // GCC, where a header may define __has_feature
inline constexpr bool kIsSanitized = true;
#elif defined(__has_feature) // Clang
inline constexpr bool kIsSanitized = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
inline constexpr bool kIsSanitized = false;
#endif

} // namespace tessera::testing
