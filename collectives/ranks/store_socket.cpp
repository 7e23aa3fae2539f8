#include <tessera/collectives/ranks/store_socket.h>

#include <tessera/base/time_limit.h>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#include <utility>

namespace tessera::internal {

namespace {

/// An address of IPv4 or IPv6 with a port, as `bind` takes it.
class SocketAddress {
 public:
  static std::optional<SocketAddress> parse(const std::string& host, uint16_t port) {
    SocketAddress address;
    if (inet_pton(AF_INET, host.c_str(), &address.v4_.sin_addr) == 1) {
      address.v4_.sin_family = AF_INET;
      address.v4_.sin_port = htons(port);
      return address;
    }
    if (inet_pton(AF_INET6, host.c_str(), &address.v6_.sin6_addr) == 1) {
      address.v6_.sin6_family = AF_INET6;
      address.v6_.sin6_port = htons(port);
      return address;
    }
    return std::nullopt;
  }

  /// What a socket is bound to.
  explicit SocketAddress(int descriptor) {
    socklen_t size = sizeof(storage_);
    TORCH_CHECK(getsockname(descriptor, get(), &size) == 0, "getsockname: ", std::strerror(errno));
  }

  bool is_loopback() const {
    if (family() == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&v6_.sin6_addr);
    return ntohl(v4_.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  sa_family_t family() const { return storage_.ss_family; }
  uint16_t port() const { return ntohs(family() == AF_INET6 ? v6_.sin6_port : v4_.sin_port); }
  socklen_t size() const { return family() == AF_INET6 ? sizeof(v6_) : sizeof(v4_); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage_); }

 private:
  SocketAddress() = default;
  union {
    sockaddr_storage storage_ = {};
    sockaddr_in v4_;
    sockaddr_in6 v6_;
  };
};

} // namespace

std::optional<StoreSocket> listen_for_store(const std::string& host, uint16_t port, StoreReach reach) {
  auto address = SocketAddress::parse(host == "localhost" ? "127.0.0.1" : host, port);
  if (!address || (address->is_loopback() && reach == StoreReach::kOtherHosts)) return std::nullopt;
  int descriptor = socket(address->family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (descriptor < 0) return std::nullopt; // a kernel without IPv6
  auto closed = c10::make_scope_exit([&] { close(descriptor); });
  const int on = 1;
  setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(descriptor, address->get(), address->size()) != 0) {
    if (errno == EADDRNOTAVAIL) return std::nullopt; // of a gateway or of a service in front of this machine
    TORCH_CHECK(false, "cannot listen at ", host, ":", port, ": ", std::strerror(errno));
  }
  TORCH_CHECK(listen(descriptor, SOMAXCONN) == 0, "cannot listen at ", host, ":", port, ": ", std::strerror(errno));
  const StoreSocket bound{descriptor, SocketAddress(descriptor).port()};
  closed.release();
  return bound;
}

c10::intrusive_ptr<c10d::Store> connect_within(std::chrono::milliseconds timeout,
                                               std::function<c10::intrusive_ptr<c10d::Store>()> connect) {
  const auto limit = timeout + std::chrono::seconds(2); // the store's own timeout says more
  auto store = within<c10::intrusive_ptr<c10d::Store>>(limit, std::move(connect));
  if (!store)
    C10_THROW_ERROR(DistNetworkError, c10::str("timed out after ", limit.count(),
                                               " ms: nothing answers there, or what answers is no store, or a DNS server that is "
                                               "asked for its name does not answer"));
  return *store;
}

} // namespace tessera::internal
