#pragma once

#include <tessera/collectives/backends/gloo/channel.h>
#include <tessera/collectives/backends/hierarchical/host_layout.h>
#include <tessera/collectives/backends/shared_memory/engine.h>
#include <tessera/collectives/backends/shared_memory/memory/arena.h>
#include <tessera/collectives/ranks/rank_watch.h>

#include <memory>
#include <string>

namespace tessera::internal::hierarchical {

/// What connects the ranks of a group over hosts.
struct Links {
  HostLayout layout;
  std::shared_ptr<gloo::Channel> all;            ///< every rank with every other; its failure is also one of `inside`
  std::shared_ptr<gloo::Channel> column;         ///< those of this rank's column, by host
  std::shared_ptr<shared_memory::Engine> inside; ///< those of this host, by column
  std::shared_ptr<shared_memory::Arena> arena;   ///< this process's, or null
  std::shared_ptr<RankWatch> watch;

  /// Lets nobody wait for this rank after a failure.
  void disconnect(const std::string& failure) const {
    all->disconnect(failure);
    column->disconnect(failure);
  }
  void close() const {
    all->close();
    column->close();
    inside->close();
  }
  /// Does what `close` does, and says that this rank goes on.
  void leave() const {
    all->leave();
    column->leave();
    inside->leave();
  }
};

} // namespace tessera::internal::hierarchical
