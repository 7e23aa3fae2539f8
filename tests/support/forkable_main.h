#pragma once

namespace tessera::testing {

/// The main of a program that `run_program` may fork (`Start::kForked`): runs `program`, which is main otherwise. Where a test
/// has started this process as a zygote, it runs in the zygote's forks, and so it does in their local ranks: `launch` starts them
/// from the program's own file, for which `posix_spawn` in this program asks another zygote.
int forkable_main(int argc, char** argv, int (*program)(int argc, char** argv));

} // namespace tessera::testing
