#include "engine/prefix_tree.h"

#include <algorithm>
#include <stdexcept>

namespace quartz::engine {

PrefixTree::PrefixTree(int64_t block_size, int64_t num_groups, int64_t max_nodes)
    : block_size_(block_size), num_groups_(num_groups), max_nodes_(max_nodes), buckets_(1024, -1) {}

uint64_t PrefixTree::hash_of(int32_t parent, const int32_t* tokens) const {
  // Multiply and fold; equality is decided by comparing tokens, so that speed is all that matters here.
  uint64_t h = static_cast<uint64_t>(static_cast<uint32_t>(parent)) * 0x9E3779B97F4A7C15ull + 0x632BE59BD9B4E019ull;
  for (int64_t i = 0; i < block_size_; ++i) {
    h = (h ^ static_cast<uint32_t>(tokens[i])) * 0xD6E8FEB86659FD93ull;
    h ^= h >> 32;
  }
  return h;
}

int32_t PrefixTree::make(int32_t parent) {
  if (num_nodes_ >= max_nodes_) return -1;
  int32_t node;
  if (!unused_.empty()) {
    node = unused_.back();
    unused_.pop_back();
  } else {
    node = static_cast<int32_t>(nodes_.size());
    nodes_.emplace_back();
    tokens_.resize(tokens_.size() + static_cast<size_t>(block_size_));
    blocks_.resize(blocks_.size() + static_cast<size_t>(num_groups_), -1);
  }
  Node& n = nodes_[static_cast<size_t>(node)];
  n = Node{};
  n.parent = parent;
  n.live = true;
  if (parent >= 0) ++nodes_[static_cast<size_t>(parent)].children;
  ++num_nodes_;
  return node;
}

int32_t PrefixTree::root(std::string_view name_space) {
  const std::string name(name_space);
  const auto found = roots_.find(name);
  if (found != roots_.end()) return found->second;
  const int32_t node = make(-1);
  if (node < 0) return -1;
  roots_.emplace(name, node);
  root_names_.emplace(node, name);
  return node;
}

int32_t PrefixTree::find(int32_t parent, const int32_t* tokens) const {
  const uint64_t hash = hash_of(parent, tokens);
  for (int32_t node = buckets_[hash & (buckets_.size() - 1)]; node >= 0;
       node = nodes_[static_cast<size_t>(node)].next) {
    const Node& n = nodes_[static_cast<size_t>(node)];
    if (n.hash == hash && n.parent == parent &&
        std::equal(tokens, tokens + block_size_, tokens_.begin() + static_cast<int64_t>(node) * block_size_)) {
      return node;
    }
  }
  return -1;
}

int32_t PrefixTree::add(int32_t parent, const int32_t* tokens) {
  const int32_t found = find(parent, tokens);
  if (found >= 0) return found;
  if (num_nodes_ >= static_cast<int64_t>(buckets_.size())) grow_buckets();
  const int32_t node = make(parent);
  if (node < 0) return -1;
  Node& n = nodes_[static_cast<size_t>(node)];
  n.hash = hash_of(parent, tokens);
  std::copy(tokens, tokens + block_size_, tokens_.begin() + static_cast<int64_t>(node) * block_size_);
  int32_t& bucket = buckets_[n.hash & (buckets_.size() - 1)];
  n.next = bucket;
  bucket = node;
  return node;
}

void PrefixTree::grow_buckets() {
  buckets_.assign(buckets_.size() * 4, -1);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    Node& n = nodes_[i];
    if (!n.live || n.parent < 0) continue;
    int32_t& bucket = buckets_[n.hash & (buckets_.size() - 1)];
    n.next = bucket;
    bucket = static_cast<int32_t>(i);
  }
}

void PrefixTree::pin(int32_t node) { ++nodes_[static_cast<size_t>(node)].pins; }

void PrefixTree::unpin(int32_t node) {
  --nodes_[static_cast<size_t>(node)].pins;
  prune(node);
}

void PrefixTree::attach(int32_t node, int64_t group, int32_t block) {
  blocks_[at(node, group)] = block;
  ++nodes_[static_cast<size_t>(node)].held;
}

void PrefixTree::detach(int32_t node, int64_t group) {
  blocks_[at(node, group)] = -1;
  --nodes_[static_cast<size_t>(node)].held;
  prune(node);
}

void PrefixTree::prune(int32_t node) {
  while (node >= 0) {
    Node& n = nodes_[static_cast<size_t>(node)];
    if (n.children > 0 || n.pins > 0 || n.held > 0) return;
    const int32_t parent = n.parent;
    if (parent < 0) {
      const auto name = root_names_.find(node);
      roots_.erase(name->second);
      root_names_.erase(name);
    } else {
      int32_t* link = &buckets_[n.hash & (buckets_.size() - 1)];
      while (*link != node) link = &nodes_[static_cast<size_t>(*link)].next;
      *link = n.next;
      --nodes_[static_cast<size_t>(parent)].children;
    }
    n.live = false;
    unused_.push_back(node);
    --num_nodes_;
    node = parent;
  }
}

std::vector<int32_t> PrefixTree::nodes() const {
  std::vector<int32_t> result;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].live && nodes_[i].held > 0) result.push_back(static_cast<int32_t>(i));
  }
  return result;
}

void PrefixTree::check() const {
  const auto fail = [](const std::string& what) { throw std::logic_error("quartz: PrefixTree.check: " + what); };
  std::vector<int32_t> children(nodes_.size(), 0);
  int64_t live = 0, roots = 0;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& n = nodes_[i];
    if (!n.live) continue;
    ++live;
    if (n.parent >= 0) {
      ++children[static_cast<size_t>(n.parent)];
      if (find(n.parent, tokens_.data() + static_cast<int64_t>(i) * block_size_) != static_cast<int32_t>(i)) {
        fail("node " + std::to_string(i) + " is not found by its tokens");
      }
    } else {
      ++roots;
    }
    int32_t held = 0;
    for (int64_t g = 0; g < num_groups_; ++g) held += block(static_cast<int32_t>(i), g) >= 0 ? 1 : 0;
    if (held != n.held) fail("node " + std::to_string(i) + " counts its blocks wrongly");
  }
  if (live != num_nodes_ || roots != static_cast<int64_t>(roots_.size())) fail("the number of nodes is wrong");
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& n = nodes_[i];
    if (!n.live) continue;
    if (n.children != children[i]) fail("node " + std::to_string(i) + " counts its children wrongly");
    if (n.children == 0 && n.pins == 0 && n.held == 0) fail("node " + std::to_string(i) + " is held by nothing");
  }
}

}  // namespace quartz::engine
