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

/// The same where texts differ. Where all ranks have the same one, none: then they exchange a checksum alone.
std::vector<std::string> gather_texts_that_differ(const std::string& text, Communicator& communicator, c10::Device device,
                                                  std::string_view label);

/// For what ranks do on their own: where one has a `failure`, a text that is not empty, an error on all of them that has the text
/// of each. Every rank of the group calls it.
void throw_failures(const std::string& failure, Communicator& communicator, c10::Device device, std::string_view label);

/// Where texts of one line an `item` first differ: "rank 0 has …, rank 2 has …", where one may have "no further buffer".
std::string first_difference(const std::vector<std::string>& texts, const std::vector<int64_t>& ranks, std::string_view item);

} // namespace tessera::internal
