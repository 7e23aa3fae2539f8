#pragma once

#include <optional>
#include <vector>

namespace tessera::testing {

/// The host of each rank in this test, as TESSERA_TEST_HOSTS says: 0011 puts ranks 2 and 3 on a second one. Empty: no such test.
std::vector<int> simulated_hosts();
/// That of this rank.
std::optional<int> simulated_host();

} // namespace tessera::testing
