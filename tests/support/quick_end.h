#pragma once

namespace tessera::testing {

/// From now on `exit` in this process destroys what was constructed from now on, and the process group, but nothing else that was
/// constructed as the program was loaded: LibTorch takes 0.16 s to forget its operators. Under a sanitizer, which looks for leaks
/// last, a process ends as always.
void end_without_unloading();

} // namespace tessera::testing
