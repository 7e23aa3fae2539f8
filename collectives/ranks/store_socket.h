#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace tessera::internal {

/// A socket that listens, for the server of a c10d store, which takes it over and closes it.
struct StoreSocket {
  int descriptor;
  uint16_t port;
};

/// Which machines may connect to a job's store.
enum class StoreReach {
  kThisHost,   ///< all ranks are on this one
  kOtherHosts, ///< some may be on others, or nobody knows
};

/// Listens at `host`:`port` alone; port 0: a free one. Where `host` is a name, or a loopback address although ranks may be on
/// other hosts, or no address of this machine: none, and the store listens at all addresses of the machine. A name may mean
/// another address elsewhere, and a launcher may say "localhost" to rank 0 alone. Throws where the port is in use.
std::optional<StoreSocket> listen_for_store(const std::string& host, uint16_t port, StoreReach reach);

/// The store that `connect` opens or reaches. Throws what it throws, and where it takes two seconds longer than `timeout`, which
/// is its own: not all that c10d does for a connection has a limit. It owns what it uses.
c10::intrusive_ptr<c10d::Store> connect_within(std::chrono::milliseconds timeout,
                                               std::function<c10::intrusive_ptr<c10d::Store>()> connect);

} // namespace tessera::internal
