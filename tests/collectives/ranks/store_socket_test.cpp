// Where a job's store listens.
#include <tessera/tests/support/matchers.h>

#include <gtest/gtest.h>
#include <tessera/collectives/ranks/store_socket.h>

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>
#include <string>

namespace tessera::internal::store_socket_test {
namespace {

bool answers(const std::string& host, uint16_t port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  EXPECT_EQ(inet_pton(AF_INET, host.c_str(), &address.sin_addr), 1);
  const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool connected = connect(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  close(descriptor);
  return connected;
}

TEST(StoreSocket, ListensAtOneAddressAlone) {
  for (const auto* host : {"127.0.0.1", "localhost"}) {
    const auto socket = listen_for_store(host, 0, StoreReach::kThisHost);
    ASSERT_TRUE(socket);
    EXPECT_GT(socket->port, 0);
    EXPECT_TRUE(answers("127.0.0.1", socket->port));
    EXPECT_FALSE(answers("127.0.0.2", socket->port));
    close(socket->descriptor);
  }
}

TEST(StoreSocket, LeavesWhatOtherHostsMayReachInAnotherWayToTheStore) {
  EXPECT_FALSE(listen_for_store("127.0.0.1", 0, StoreReach::kOtherHosts)); // rank 0 alone may have been told so
  EXPECT_FALSE(listen_for_store("::1", 0, StoreReach::kOtherHosts));
  EXPECT_FALSE(listen_for_store("node0", 0, StoreReach::kOtherHosts));
  EXPECT_FALSE(listen_for_store("192.0.2.1", 0, StoreReach::kOtherHosts)); // of no machine
}

TEST(StoreSocket, APortInUseIsNamed) {
  const auto first = listen_for_store("127.0.0.1", 0, StoreReach::kThisHost);
  ASSERT_TRUE(first);
  EXPECT_THROWS_WITH(listen_for_store("127.0.0.1", first->port, StoreReach::kThisHost),
                     "cannot listen at 127.0.0.1:" + std::to_string(first->port) + ": Address already in use");
  close(first->descriptor);
}

} // namespace
} // namespace tessera::internal::store_socket_test
