#include <tessera/base/descriptors.h>

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

namespace tessera::internal::gloo {

namespace {

constexpr int kSpare = 16; // for files, and for strangers who connect to gloo's port

std::set<int> open_descriptors() {
  std::set<int> open;
  std::error_code ignored; // of a descriptor that is closed meanwhile
  for (std::filesystem::directory_iterator it("/proc/self/fd", ignored), end; !ignored && it != end; it.increment(ignored))
    open.insert(std::atoi(it->path().filename().c_str()));
  std::erase_if(open, [](int descriptor) { return fcntl(descriptor, F_GETFD) == -1; }); // the listing's own
  return open;
}

bool is_for_communication(int descriptor) {
  std::error_code ignored;
  const auto kind = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor), ignored).string();
  return kind.starts_with("socket:") || kind.starts_with("pipe:") || kind == "anon_inode:[eventpoll]";
}

} // namespace

void reserve_descriptors(int needed) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const auto open = open_descriptors();
  // Listing them takes a descriptor too: none are listed where none is left.
  const rlim_t in_use = open.empty() ? limit.rlim_cur : open.size();
  const rlim_t wanted = in_use + static_cast<rlim_t>(needed + kSpare);
  if (wanted <= limit.rlim_cur) return;
  TORCH_CHECK(wanted <= limit.rlim_max, "this process needs ", needed, " more file descriptors for connections and ", kSpare,
              " to spare; it has ", in_use, " open, of at most ", limit.rlim_max, ": close some, or raise the limit (ulimit -n)");
  limit.rlim_cur = wanted;
  TORCH_CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "cannot raise the limit of open file descriptors to ", wanted, ": ",
              std::strerror(errno));
}

bool raise_descriptor_limit() noexcept {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return false;
  limit.rlim_cur = limit.rlim_cur > limit.rlim_max / 2 ? limit.rlim_max : 2 * limit.rlim_cur;
  return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

OpenedDescriptors::OpenedDescriptors() : before_(open_descriptors()) {}

std::vector<Socket> OpenedDescriptors::close_on_exec() const noexcept try {
  std::vector<Socket> sockets;
  for (const int descriptor : open_descriptors()) {
    if (before_.contains(descriptor) || !is_for_communication(descriptor)) continue;
    fcntl(descriptor, F_SETFD, FD_CLOEXEC);
    struct stat status = {};
    if (fstat(descriptor, &status) == 0 && S_ISSOCK(status.st_mode)) sockets.push_back({descriptor, status.st_ino});
  }
  return sockets;
} catch (const std::exception&) { // no memory for the list: they stay as they are
  return {};
}

bool any_is_unread(const std::vector<Socket>& sockets) {
  return std::any_of(sockets.begin(), sockets.end(), [](const Socket& socket) {
    struct stat status = {};
    if (fstat(socket.descriptor, &status) != 0 || !S_ISSOCK(status.st_mode) || status.st_ino != socket.inode) return false;
    pollfd polled{socket.descriptor, POLLIN, 0};
    return poll(&polled, 1, 0) > 0;
  });
}

} // namespace tessera::internal::gloo
