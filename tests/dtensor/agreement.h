#pragma once

#include <memory>

#include <tessera/mesh/device_mesh.h>

namespace tessera::testing {

/// Whether the ranks of a mesh, all on this machine, go the same way. Through shared memory: a replay asks three times a call,
/// and with collectives the asking took most of its time.
class Agreement {
 public:
  /// Every rank of the mesh makes one.
  explicit Agreement(const DeviceMesh& mesh);

  /// True on every rank where it is on all. An error when the others do not ask within a minute: they wait in another collective.
  bool everyone(bool fine) const;

 private:
  struct Board;
  std::shared_ptr<Board> board_;
  int ranks_;
};

} // namespace tessera::testing
