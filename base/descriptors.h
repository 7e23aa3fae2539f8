#pragma once

#include <sys/types.h>
#include <set>
#include <vector>

namespace tessera::internal::gloo {

/// Makes sure that this process can open `needed` more descriptors: raises the soft limit of RLIMIT_NOFILE, up to the hard one,
/// where it is too low. Throws c10::Error with the numbers when the hard one is. gloo ends the process when it runs out of them.
void reserve_descriptors(int needed);

/// Doubles the soft limit, up to the hard one. False where it is that.
bool raise_descriptor_limit() noexcept;

/// A socket of this process, which may be closed and its descriptor be used for something else.
struct Socket {
  int descriptor;
  ino_t inode; ///< another one for each socket
};

/// Whether data have come for one of `sockets`, or its end, that nobody has read yet.
bool any_is_unread(const std::vector<Socket>& sockets);

/// The sockets, pipes and epoll descriptors that were opened since its construction can be marked as closed in programs that this
/// process starts: such a program would hold connections open that are to end with this process. What another thread opens
/// meanwhile is marked as well, and a program that another thread starts meanwhile holds them still.
class OpenedDescriptors {
 public:
  OpenedDescriptors();
  /// Returns the sockets.
  std::vector<Socket> close_on_exec() const noexcept;

 private:
  std::set<int> before_;
};

} // namespace tessera::internal::gloo
