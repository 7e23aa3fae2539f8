#pragma once

// Internal: what every rank of a group has to say, as text.

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/collectives/communicator.h>

namespace tessera::internal {

/// Every rank's `text`, in the order of the group, sent by way of `device`. Every rank of the group calls it.
std::vector<std::string> gather_texts(const std::string& text, Communicator& communicator, c10::Device device,
                                      std::string_view label);

/// Gathers the texts only if they differ. If all ranks have the same one, it returns none: then they exchange a checksum alone.
std::vector<std::string> gather_texts_that_differ(const std::string& text, Communicator& communicator, c10::Device device,
                                                  std::string_view label);

/// Throws on all ranks where one has a `failure`, a text that is not empty, for what ranks do on their own: the error has the
/// text of each. Every rank of the group calls it.
void throw_failures(const std::string& failure, Communicator& communicator, c10::Device device, std::string_view label);

/// Says where texts of one line an `item` first differ: "rank 0 has …, rank 2 has …", where one may have "no further buffer".
std::string first_difference(const std::vector<std::string>& texts, const std::vector<int64_t>& ranks, std::string_view item);

} // namespace tessera::internal
