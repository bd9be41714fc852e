// Which blocks hold the keys of which tokens. A node stands for one full block of tokens behind those of its parents
// and knows, a group, the block with its keys (-1: none any more; in a state group, the state after its last token).
// Roots are namespaces. Nodes are found by a hash and compared token for token: a hit is exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace quartz::engine {

class PrefixTree {
 public:
  // At most `max_nodes` nodes: then add() gives -1 until some are forgotten.
  PrefixTree(int64_t block_size, int64_t num_groups, int64_t max_nodes);

  int32_t root(std::string_view name_space);                  // made if it is new; goes when nothing holds it
  int32_t find(int32_t parent, const int32_t* tokens) const;  // tokens: block_size of them; -1: unknown
  int32_t add(int32_t parent, const int32_t* tokens);         // found or made

  // A pinned node stays, and with it its parents.
  void pin(int32_t node);
  void unpin(int32_t node);

  int32_t block(int32_t node, int64_t group) const { return blocks_[at(node, group)]; }
  void attach(int32_t node, int64_t group, int32_t block);
  void detach(int32_t node, int64_t group);  // the node goes too when nothing holds it any more

  int64_t num_nodes() const { return num_nodes_; }
  // All nodes that have a block, for tests and for a reset.
  std::vector<int32_t> nodes() const;
  // Throws std::logic_error if counts and links disagree.
  void check() const;

 private:
  struct Node {
    int32_t parent = -1;  // -1: a root
    int32_t next = -1;    // in the bucket
    int32_t children = 0;
    int32_t pins = 0;
    int32_t held = 0;  // blocks attached
    bool live = false;
    uint64_t hash = 0;
  };

  size_t at(int32_t node, int64_t group) const {
    return static_cast<size_t>(node) * static_cast<size_t>(num_groups_) + static_cast<size_t>(group);
  }
  int32_t make(int32_t parent);
  void prune(int32_t node);
  void grow_buckets();
  uint64_t hash_of(int32_t parent, const int32_t* tokens) const;

  int64_t block_size_, num_groups_, max_nodes_, num_nodes_ = 0;
  std::vector<Node> nodes_;
  std::vector<int32_t> tokens_, blocks_, unused_, buckets_;
  std::unordered_map<std::string, int32_t> roots_;
  std::unordered_map<int32_t, std::string> root_names_;
};

}  // namespace quartz::engine
